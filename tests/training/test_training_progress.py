"""What a person sees of a training run: a bar on a terminal, plain lines in a file."""

from __future__ import annotations

import io

from rich.console import Console

from selfspec.training.progress import TrainingDisplay

RECORDS = [
    {"doing": "target features [for] shard-00000"},
    {"step": 5, "epoch": 0, "loss": 3.21, "lr": 0.001, "answer_tokens_per_s": 812.4},
    {"step": 5, "held_out_alpha": 0.25, "held_out_alpha_by_position": [0.25, None], "held_out_by_exit": {"6": {}}},
]


def shown(terminal: bool) -> str:
    out = io.StringIO()
    with TrainingDisplay(10, Console(file=out, force_terminal=terminal, width=100, highlight=False)) as display:
        for record in RECORDS:
            display(record)
    return out.getvalue()


def test_a_file_gets_one_plain_line_per_record():
    lines = shown(terminal=False).splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == [
        "doing target features [for] shard-00000",
        "step 5  epoch 0  loss 3.21  lr 0.001  answer_tokens_per_s 812.4",
        "step 5  held_out_alpha 0.25  held_out_alpha_by_position 0.250/–",
    ]


def test_a_terminal_gets_a_bar_and_the_held_out_checks_above_it():
    text = shown(terminal=True)
    assert "5/10" in text and "loss 3.210" in text and "812 answer tokens/s" in text
    assert "held_out_alpha 0.25" in text and "epoch 0" not in text
