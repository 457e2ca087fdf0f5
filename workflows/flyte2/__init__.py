"""The same pipelines on Flyte 2, another SDK (`flyte`) than flytekit 1.

    flyte run --local workflows/flyte2/rlhf.py rlhf

`host` is Flyte 2 as a stage sees it, `environments` its machines, `stages` has a task a stage, and
`entry` makes the commands of `workflows.pipelines`. docs/flyte2.md says what maps to what.
"""
