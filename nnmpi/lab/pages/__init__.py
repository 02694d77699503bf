"""Interactive pages: one HTML file each with data and scripts inside; no network, no build step.

    page       fills the frame with a script and its data
    picture    Picture: bars and arrows, as text and for slides (matplotlib)
    frame      the head, and colours of the light and the dark theme (HTML, CSS)
    common     elements, sliders, stepping by buttons and keys, charts (JavaScript)
    *.js       a script per kind of page: collective, schedule, plan, run

Scripts and CSS are formatted by `prettier --print-width 100`.

The package computes all numbers. A page draws them; its sliders only put bytes, latency and
bandwidth into cost formulas that the package computed.
"""
