"""The links of the nodes: who may use them when, if several messages want to.

A link carries one message out and one message in at a time, for as long as its bytes take (not during its latency).
Messages get it in the order in which they become ready:

    ready      a    b c                        a, b and c leave the same node
    link out   |-- a --|-- b --|-- c --|
    there               .a      .b      .c     each its latency after its last byte has left

A message waits until both links are free, that of the node it leaves and that of the node it enters. Collectives are
simulated on these links (`simulate`), and so are the messages of simulated ranks (`simulated.network`).
"""

# Moments closer than this are the same: the last digits of sums must not decide who goes first.
INSTANT_S = 1e-12


class Links:
    """The links of so many nodes, all free at first."""

    def __init__(self, nodes: int) -> None:
        self._out_free_s, self._in_free_s = [0.0] * nodes, [0.0] * nodes

    def send(self, source: int, target: int, ready_s: float, wire_s: float) -> float:
        """Let one message of `wire_s` seconds pass between two nodes; return when it begins.

        A message that waits for the other node's link keeps its own node's link until then: those behind it wait too,
        even for nodes that are free (head-of-line blocking).
        """
        begin_s = max(ready_s, self._out_free_s[source], self._in_free_s[target])
        self._out_free_s[source] = self._in_free_s[target] = begin_s + wire_s
        return begin_s
