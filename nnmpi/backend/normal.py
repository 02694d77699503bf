"""The normal distribution's upper tail, for GELU by NumPy and by compiled loops.

    1 - Phi(s)  =  exp(-s^2 / 2) P(u)    for s >= 0,    u = 10 / (5 + s) - 5 / 4

P is smooth, so a short polynomial does. Its coefficients, from that of u^0 up, were fitted with 50
digits to the least error of s times the tail: 2e-9 and 2e-17. A series for the error function took
13 and 27 terms, and 1 + erf(x) lost the digits of small tails.
"""

TAIL_SINGLE = (
    0.12151389535573659,
    0.22016280503651803,
    0.1989322070669044,
    0.1462892764221912,
    0.08800821972200903,
    0.03730106329341511,
    0.0171412607029773,
)
TAIL_DOUBLE = (
    0.12151394835556177,
    0.220162786142393,
    0.19891268644128038,
    0.14651676708149936,
    0.0868935148816114,
    0.04013456828289287,
    0.013313914532344387,
    0.0024068053161536793,
    -0.00024113547625436392,
    -0.00026399753243662655,
    -3.230316133072352e-05,
    1.8440954730501833e-05,
    8.814781084205745e-06,
    -4.338244497387271e-06,
    5.04612837943307e-07,
)
