"""Whatever a command prints in columns fits the terminal, and is whole in a pipe."""

from __future__ import annotations

import pytest

from cppmega.cli import main
from tests.host.test_table import WIDTHS, on_a_terminal
from tests.support import REPOSITORY

COMMANDS = (
    "list",
    "list --upstream",
    "recipes",
    "explain dsa_attention_kernels",
    "explain --fp8-param-gather",
    "explain --use-megatron-fsdp",
    "runs --runs tests/runs/made_at_430962d",
    "compare --runs tests/runs/made_at_430962d finished crashed",
)


def printed(capsys: pytest.CaptureFixture[str], command: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(command.split())
    assert end.value.code == 0, command
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_fits_the_terminal_and_loses_nothing(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    whole = printed(capsys, command)
    for columns in WIDTHS:
        on_a_terminal(monkeypatch, columns)
        shown = printed(capsys, command)
        assert max(map(len, shown.splitlines())) <= columns
        assert "".join(shown.replace("\\\n", "\n").split()) == "".join(whole.split())
    assert max(map(len, whole.splitlines())) > min(WIDTHS)
