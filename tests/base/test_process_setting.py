"""Settings of the whole process: held while anybody needs them, and brought back."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from tiny_engine import backbone_of
from torch import nn

from featx.base import ProcessSetting, cpu_threads, quiet_logs
from featx.engine import Engine


class Dial:
    """A setting to look at."""

    def __init__(self) -> None:
        self.value = 7

    def put(self, value: int) -> None:
        self.value = value

    def held(self) -> ProcessSetting[int]:
        return ProcessSetting(lambda: self.value, self.put, 1)


def test_users_that_overlap_may_leave_in_any_order() -> None:
    dial = Dial()
    held = dial.held()
    held.__enter__()
    assert dial.value == 1
    held.__enter__()
    held.__exit__()
    assert dial.value == 1
    held.__enter__()
    held.__exit__()
    held.__exit__()
    assert dial.value == 7


def test_what_was_set_between_two_uses_is_what_comes_back() -> None:
    dial = Dial()
    held = dial.held()
    for value in (7, 9):
        dial.value = value
        with held:
            assert dial.value == 1
        assert dial.value == value


def test_threads_that_come_and_go_never_see_another_value() -> None:
    dial = Dial()
    held = dial.held()
    seen: set[int] = set()

    def use() -> None:
        for _ in range(2000):
            with held:
                seen.add(dial.value)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {1}
    assert dial.value == 7


def test_of_two_engines_the_one_opened_first_may_close_first() -> None:
    """The fused kernel of transformer layers stays off for the second, and comes back after it."""
    cpu = torch.device("cpu")
    first, second = (Engine(backbone_of(nn.Identity()), cpu, "float32") for _ in range(2))
    assert torch.backends.mha.get_fastpath_enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__()
    assert torch.backends.mha.get_fastpath_enabled()


def test_blocks_of_two_threads_bring_back_threads_and_logs() -> None:
    """A thread that starts later begins with the number that another one has set last."""

    def settings() -> tuple[int, int]:
        return torch.get_num_threads(), logging.root.manager.disable

    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        before = settings()
        first, second = contextlib.ExitStack(), contextlib.ExitStack()
        for stack, method in ((first, "enter"), (second, "enter"), (first, "end"), (second, "end")):
            with ThreadPoolExecutor(1) as thread:
                if method == "end":
                    thread.submit(stack.close).result()
                    continue
                for context in (cpu_threads(1), quiet_logs()):
                    thread.submit(stack.enter_context, context).result()
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(settings).result() == before
    finally:
        torch.set_num_threads(usual)
