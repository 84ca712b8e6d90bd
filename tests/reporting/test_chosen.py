"""What a training chose for its memory: in words, on the page, in Markdown."""

from pathlib import Path
from typing import Any

from qtool.reporting.chosen import chosen_markdown, chosen_rows, chosen_sentence
from qtool.reporting.gather import gather
from qtool.reporting.page import page, summary
from qtool.reporting.terminal import train_lines
from qtool.system.json_files import write_json

MIB = 2**20
MEMORY: dict[str, Any] = {
    "asked": "--memory-budget 60MiB",
    "chosen": {"precision": "bf16-mixed"},
    "flags": "--precision bf16-mixed",
    "considered": [
        {"flags": "", "predicted_peak_bytes": 80 * MIB},
        {"flags": "--activation-checkpointing", "predicted_peak_bytes": None},
        {"flags": "--precision bf16-mixed", "predicted_peak_bytes": 46 * MIB},
    ],
    "predicted_peak_bytes": 46 * MIB,
    "limit_bytes": 60 * MIB,
    "why": "the fastest choice predicted to fit (its step estimated at 0.6 times that without)",
}
SENTENCE = (
    "--memory-budget 60MiB: --precision bf16-mixed, the fastest choice predicted to fit "
    "(its step estimated at 0.6 times that without); predicted peak 46.0 of 60.0 MiB, 3 predictions"
)


def test_the_sentence_says_what_was_chosen_why_and_of_how_many() -> None:
    assert chosen_sentence(MEMORY) == SENTENCE
    assert chosen_sentence(MEMORY, 2) == f"{SENTENCE}; micro-batches halved 2 times, memory having run out"
    plain = MEMORY | {"flags": "", "considered": MEMORY["considered"][:1]}
    assert ": nothing changed, " in chosen_sentence(plain)
    assert chosen_sentence(plain).endswith("1 prediction")


def test_every_prediction_has_a_row() -> None:
    assert chosen_rows(MEMORY)[1] == [
        ["as given", "80.0", "no"],
        ["--activation-checkpointing", "–", "refused"],
        ["--precision bf16-mixed", "46.0", "yes"],
    ]
    assert "| --precision bf16-mixed | 46.0 | yes |" in chosen_markdown(MEMORY)


def test_page_markdown_and_terminal_tell_it(tmp_path: Path) -> None:
    history = {
        "losses": [2.0, 1.0],
        "epochs": [{"loss": 1.5}],
        "halvings": 1,
        "skipped_steps": 0,
        "stopped_early": False,
    }
    result = {
        "schema": 1, "stage": "train", "config": {}, "inputs": {}, "outputs": {}, "metrics": {}, "environment": {},
        "source": {"model": "m"}, "history": history, "memory": MEMORY,
    }  # fmt: skip
    write_json(tmp_path / "train.json", result)
    run = gather(tmp_path)
    assert f"Memory: {SENTENCE}; micro-batches halved 1 time".replace(" %", "\xa0%") in page(run)
    assert f"### Training memory\n\n{SENTENCE}; micro-batches halved 1 time" in summary(run)
    assert f"  {SENTENCE}; micro-batches halved 1 time, memory having run out" in [*train_lines(result)]
