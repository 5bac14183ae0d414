"""What sampling gains for banded noise on balls-in-bins: `python -m benchmarks.balls_in_bins`.

The table has three epsilons of the same noise. "residue told" is the account that takes a client's
bin modulo the bands for known, and is computed. "claimed" is what fedlm claims: the smaller of that
and an upper confidence bound from samples, in which nothing is known. "independent" is the epsilon
of as many bins that do not overlap, below which the truth cannot be.
"""

from __future__ import annotations

import time

from benchmarks.accounting import DELTA, column_of
from fedlm.privacy import balls_in_bins, bin_samples
from fedlm.privacy.cost import compose

CASES = [(500, 200, 10, 1.2), (500, 200, 20, 1.5), (500, 20, 2, 4.0), (500, 20, 5, 4.0)]


def main() -> None:
    """Print the table."""
    print("| rounds | bins | bands | noise | residue told | claimed | independent | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for rounds, bins, bands, noise in CASES:
        overlap = bin_samples.overlap_of(column_of(rounds, bands), rounds, rounds, bins)
        began = time.perf_counter()
        told, claimed, least = (
            compose([balls_in_bins.event_of_bins(noise, rounds, bins, *more)], DELTA)[0]
            for more in ((bands, 1.0, None), (bands, 1.0, overlap), (1, 1.0, None))
        )
        print(
            f"| {rounds} | {bins} | {bands} | {noise:g} | {told:.2f} | {claimed:.2f} | "
            f"{least:.2f} | {time.perf_counter() - began:.0f} |",
            flush=True,
        )
    print(f"\nAt delta {DELTA:g}; {bin_samples.SAMPLES} samples per order.")


if __name__ == "__main__":
    main()
