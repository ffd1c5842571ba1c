"""`python -m benchmarks.soak.churn`: thousands of adapters registered, hundreds replaced a minute.

Measures what a name costs as names grow (`names`), how long a load takes until the first right
answer, and what memory does while adapters come and go under traffic (`__main__`).
"""
