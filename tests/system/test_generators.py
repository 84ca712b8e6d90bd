import random

import numpy as np
import torch

from qtool.steps import trees
from qtool.system import generators


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_generators_resume_from_a_stored_state(tmp_path):
    with generators.seeded(1):
        draw()
        trees.save_tree(tmp_path / "x.safetensors", generators.rng_state())
        expected = draw()
        draw()
        generators.set_rng_state(trees.load_tree(tmp_path / "x.safetensors"))
        assert draw() == expected


def test_seeding_is_repeatable_and_leaves_the_caller_alone():
    before = generators.rng_state()
    draws = []
    for _ in range(2):
        with generators.seeded(7):
            draws.append(draw())
    assert draws[0] == draws[1]
    assert generators.rng_state()["python"] == before["python"]
    assert torch.equal(torch.get_rng_state(), before["torch"])
    assert torch.equal(generators.rng_state()["numpy"][1], before["numpy"][1])


def test_a_machine_with_fewer_gpus_takes_the_generators_that_it_has(monkeypatch):
    told = []
    state = generators.rng_state() | {"cuda": ["first", "second"]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", told.append)
    generators.set_rng_state(state)
    assert told == [["first"]]
