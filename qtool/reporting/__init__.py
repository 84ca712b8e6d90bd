"""Numbers to reading matter: terminal tables, Markdown, verdict sentences, and one HTML page."""
