"""Parts that tests of checkpoints in the background share."""

import time

from torch import nn

WIDTH = 8


class Net(nn.Module):
    """With buffers that differ between ranks, and random numbers of each rank."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(4 * width, width),
        )

    def forward(self, inputs):
        found = self.layers(inputs)
        return found


def await_true(condition, within_s=60.0):
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.001)


def folder_of(number):
    return f"step_{number:010d}"
