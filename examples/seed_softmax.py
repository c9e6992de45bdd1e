"""The first tutorial's two softmaxes beside ours, and its formula box, which is not softmax.

Left: the algorithm for the rows of x in plain NumPy, an element at a time. Right: the line of
``simattn/softmax.py`` that does the same to a tile. Ours also says what moves between the memories.
(The tutorial's own 3-pass code does not run: it fills an array ``a`` that it never made, and
indexes a vector with two indices. What is below is what it means.)
Run: python examples/seed_softmax.py. Read next: seed_untiled.py.
"""

import numpy as np

from simattn import row_softmax

exp, inf = np.exp, np.inf


# fmt: off
def softmax_3_pass(x, a):                            # safe(sram, X, Y, ...)
    for b in range(x.shape[0]):                      # for i in tiles(0, X.shape[0], block_q):
        m, l = -inf, 0.0                             #     state = OnlineSoftmax.empty(...)
        for i in range(x.shape[1]):                  #     for j in tiles(0, X.shape[1], block_k):
            m = max(m, x[b, i])                      #         m = x.rowmax(state.m)
        for i in range(x.shape[1]):                  #     for j in tiles(...):
            l += exp(x[b, i] - m)                    #         state.l.add_rowsum(P)
        for i in range(x.shape[1]):                  #     _divide_pass: for j in tiles(...):
            a[b, i] = exp(x[b, i] - m) / l           #         P /= state.l; sram.store(Y[i, j], P)
    return a


def online_softmax_2_pass(x, a):                     # online(sram, X, Y, ...)
    for b in range(x.shape[0]):                      # for i in tiles(0, X.shape[0], block_q):
        m, l = -inf, 0.0                             #     state = OnlineSoftmax.empty(...)
        for i in range(x.shape[1]):                  #     for j in tiles(...): state.update(...):
            m_i = max(m, x[b, i])                    #         m = S.rowmax(self.m)
            c, p = exp(m - m_i), exp(x[b, i] - m_i)  #         c = ..., P = S.shift(self.m).exp()
            m, l = m_i, l * c + p                    #         l *= c; l.add_rowsum(P)
        for i in range(x.shape[1]):                  #     _divide_pass: for j in tiles(...):
            a[b, i] = exp(x[b, i] - m) / l           #         P /= state.l; sram.store(Y[i, j], P)
    return a


def formula_box(x, a):                               # printed in the tutorial beside the 3 passes
    for b in range(x.shape[0]):
        m, l = -inf, 0.0
        for i in range(x.shape[1]):
            m = max(m, x[b, i])
            l += exp(x[b, i] - m)                    # WRONG: under an older m, never rescaled
        for i in range(x.shape[1]):
            a[b, i] = exp(x[b, i] - m) / l
    return a
# fmt: on


def main() -> None:
    x = np.random.default_rng(0).standard_normal((6, 10))
    truth = exp(x) / exp(x).sum(axis=1, keepdims=True)
    print("rows of 6 x 10     error     row sums      ours     error   traffic an element")
    for tutorial, name in (
        (softmax_3_pass, "safe"),
        (online_softmax_2_pass, "online"),
        (formula_box, None),
    ):
        a = tutorial(x, np.zeros_like(x))
        sums = a.sum(axis=1)
        line = f"{tutorial.__name__:<22} {np.abs(a - truth).max():8.1e}"
        line += f"  {sums.min():.2f} .. {sums.max():.2f}"
        if name:
            run = row_softmax(x, algorithm=name)  # one element at a time
            each = run.traffic.total_elems // x.size
            line += f"   {name:<7} {np.abs(run.out - truth).max():8.1e}   {each}"
        print(line)


if __name__ == "__main__":
    main()
