"""Models that have no family here: transformers' modules, with our attention, linears and LoRA.

`reading` finds the class, `tracing` runs it once without weights to see what it computes, `spec`
is the `ModelSpec` of that, and `model` the `Model`. That a row's bits depend on no other row is
the work of `row_operations`.
"""
