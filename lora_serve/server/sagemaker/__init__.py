"""The route by which SageMaker's hosting asks for answers of every kind."""
