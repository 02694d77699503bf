"""Choosing a layout and looking after runs and machines: measured, predicted, drawn and explained.

    plan, verify, speedup, doctor, memory, comm, schedule     commands, a file each
    report, run; launching                                    a run's page; its supervisor
    planner/     the fastest layout: profile, network, price, and the race of --layout auto
    measure      makes the fit of a machine
    onnx/        models as ONNX files
    render/      collectives and schedules as text and pictures; what notebooks show
    pages/       interactive pages

It imports the core. Nothing below imports it: see `base.wings`.
"""
