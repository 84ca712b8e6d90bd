"""How bash, zsh and fish complete a command line: click's scripts, with what these leave out of ``--option=value``."""

from __future__ import annotations

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

SHELLS = ("bash", "zsh", "fish")


class _WithEquals(ShellComplete):
    """Completes ``--option=value`` as well, of which click forgets the option."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        option, equals, _ = incomplete.partition("=")
        found = super().get_completions(args, incomplete)
        if equals and option.startswith("--"):  # the shell replaces all of the word
            for item in found:
                item.value = f"{option}={item.value}"
        return found


class _Bash(BashComplete):
    """Has the option, ``=`` and the value as three words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        return args[:-1] if args[-1:] == ["="] else args, incomplete


class _Zsh(_WithEquals, ZshComplete):
    pass


class _Fish(_WithEquals, FishComplete):
    source_template = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')  # lists


for _shell in (_Bash, _Zsh, _Fish):
    add_completion_class(_shell)
