"""Pages that run in a browser: one file each, with its numbers inside; no network and no build
step.

    page       puts a page together out of the files here and the numbers that it shows
    picture    Picture: bars and arrows, as text and for slides (matplotlib)
    frame      what all pages have: head, and colours for light and dark (HTML, CSS)
    common     elements, sliders, stepping by buttons and keys, charts (JavaScript), and a script
               for each kind of page

The numbers come from the package: a page draws them, and puts bytes and seconds into formulas that
it was given.
"""
