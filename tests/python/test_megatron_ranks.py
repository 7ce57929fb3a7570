"""Captured steps of two ranks, beside Megatron's own, on the CPU."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import stepgraph.megatron
from megatron_world import TinyTraining, assert_same, pair, pretended_gpu, process_groups


def _rank_of_two(rank: int, directory: str, path: list[str]) -> None:
    sys.path[:0] = path
    torch.set_num_threads(1)
    stepgraph.megatron.install()
    with pretended_gpu() as device, process_groups(rank, 2, directory):
        for dtype, distributed in (
            (torch.bfloat16, False),
            (torch.bfloat16, True),
            (torch.float16, True),
        ):
            theirs, ours = pair(
                dtype, device, distributed=distributed, clip_grad=0.1, log_num_zeros_in_grad=True
            )
            wrapper = ours.wrap()
            for training in (theirs, ours):
                for step in range(8):
                    # The infinity is in the gradient of one rank only; both have to skip.
                    overflow = dtype is torch.float16 and step in (3, 4) and rank == 1
                    training.step(step, overflow)
            assert_same(theirs, ours)
            assert wrapper.replays == 7
            if dtype is torch.float16:
                assert [r[0] for r in ours.results] == [step not in (3, 4) for step in range(8)]

        theirs, ours = pair(torch.float16, device, TinyTraining, distributed=True, clip_grad=0.1)
        wrapper = ours.wrap()
        for training in (theirs, ours):
            training.run(range(8), overflows=(0, 4))
        assert_same(theirs, ours)
        (leaf,) = ours.optimizer.chained_optimizers
        groups = leaf.optimizer.param_groups
        assert any(group["params"] for group in groups) is (rank == 0)
        assert {group["step"] for group in groups} == {6}
        assert wrapper.captures == 1
    Path(directory, f"done{rank}").touch()


def test_two_ranks_skip_together() -> None:
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(_rank_of_two, (directory, sys.path), nprocs=2)
        assert len(list(Path(directory).glob("done*"))) == 2
