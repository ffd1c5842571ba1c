"""`python -m benchmarks.soak`: mixed traffic and faults on a live server, every answer checked.

What is asked is a fixed table of questions (`questions`); what each adapter version answers to
each of them was asked of a cold server before (`cold_answers`), one question at a time. Then
clients (`traffic`) ask at random while adapters change (`tenants`) and things break (`faults`); a
sampler (`samples`) looks at the server's processes; at the end `verdict` says whether all was well.
"""
