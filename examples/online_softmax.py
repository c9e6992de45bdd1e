"""Online softmax by hand: one query, four keys, and the state (m, l, acc) after each.

The scores are ln 1, ln 4, ln 2, ln 8, so every exp is a power of two and can be checked in the
head: softmax is (1, 4, 2, 8) / 15. What is printed was stored from SRAM to HBM to be seen at all.
Run: python examples/online_softmax.py. Read next: seed_softmax.py.
"""

import numpy as np

from simattn import exact
from simattn.dtypes import FLOAT64
from simattn.memory import HBM, SRAM
from simattn.softmax import OnlineSoftmax
from simattn.variants import scores

Q = np.array([[1.0]])  # [1, 1]
K = np.log([[1.0], [4.0], [2.0], [8.0]])  # [4, 1]
V = np.array([[6.0, 0.0], [2.0, 7.0], [4.0, 8.0], [1.0, 2.0]])  # [4, 2]


class Machine:
    """Q, K, V in HBM, an SRAM, and a place in HBM for each thing that we want to look at."""

    def __init__(self) -> None:
        self.hbm, self.sram = HBM(), SRAM(FLOAT64)
        for name, array in (("Q", Q), ("K", K), ("V", V)):
            self.hbm.place(name, array, FLOAT64)
        self.m, self.l, self.acc = np.empty(1), np.empty(1), np.empty((1, 2))
        for name, array in (("m", self.m), ("l", self.l), ("O", self.acc)):
            self.hbm.place(name, array, FLOAT64)
        self.Q = self.sram.load(self.hbm.Q)

    def take_in(self, state: OnlineSoftmax, j: slice) -> None:
        K, V = self.sram.load(self.hbm.K[j]), self.sram.load(self.hbm.V[j])
        state.update(scores(self.Q, K, 1.0, None), V)
        self.sram.free(K, V)

    def look(self, state: OnlineSoftmax) -> str:
        for region, tile in zip((self.hbm.m, self.hbm.l, self.hbm.O), state.tiles(), strict=True):
            self.sram.store(region, tile)
        m = f"ln {round(np.exp(self.m[0]))}" if np.isfinite(self.m[0]) else "-inf"
        return f"{m:>5}  {self.l[0]:6.4g}   {self.acc[0, 0]:6.4g} {self.acc[0, 1]:6.4g}"


def main() -> None:
    machine = Machine()
    state = OnlineSoftmax.empty(machine.sram, rows=1, width=2)
    print("c = exp(m_old - m) shrinks what was summed so far; p = exp(score - m) weighs the key.")
    print("l = l c + p;  acc = acc c + p v\n")
    print("key  score  value         c       p       m       l           acc")
    print(f"{'none so far':<32}{machine.look(state)}")
    for j in range(4):
        before = float(machine.m[0])
        machine.take_in(state, slice(j, j + 1))
        seen = machine.look(state)
        c, p = np.exp(before - machine.m[0]), np.exp(K[j, 0] - machine.m[0])
        score, value = f"ln {np.exp(K[j, 0]):.0f}", f"({V[j, 0]:.0f}, {V[j, 1]:.0f})"
        print(f"{j + 1:>3}  {score:>5}  {value:<8}{c:>7.4g} {p:>7.4g}   {seen}")

    by_hand = np.array([1, 4, 2, 8]) @ V / 15
    print(f"\nacc / l = {(machine.acc / machine.l)[0]}, by hand (1, 4, 2, 8) V / 15 = {by_hand}")

    left = OnlineSoftmax.empty(machine.sram, rows=1, width=2)
    right = OnlineSoftmax.empty(machine.sram, rows=1, width=2)
    machine.take_in(left, slice(0, 2))  # two keys in one tile: the same recurrence
    machine.take_in(right, slice(2, 4))
    left.merge(right)
    print(f"Keys 1, 2 and keys 3, 4 apart, merged: {machine.look(left).lstrip()}, as above")

    machine.sram.store(machine.hbm.O, state.finish())
    out, _ = exact.attention(Q, K, V, scale=1.0)
    same = np.allclose(machine.acc, out, rtol=1e-14, atol=0)
    print(f"Exact softmax in one piece: {out[0]}: {'equal' if same else 'NOT EQUAL'} to 1e-14")


if __name__ == "__main__":
    main()
