"""Gates: what a file has to prove before it takes its name, each in a file of its own."""
