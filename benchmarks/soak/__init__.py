"""`python -m benchmarks.soak`: mixed traffic and faults on a live server, every answer checked.

What is asked is a fixed table of questions (`questions`); what each adapter version answers to
each of them was asked of a cold server before (`cold_answers`), one question at a time. Then
clients (`traffic`) ask at random while adapters change (`tenants`), admins race (`admins`) and
things break (`faults`, `hostile`). A sampler (`samples`) looks at the server's processes, a probe
(`health`) asks whether it is well; at the end `verdict` says whether all was well.
"""
