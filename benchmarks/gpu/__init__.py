"""The GPU engine measured on the card it runs on: kernels, whole steps, and transformers beside it.

Needs no network and no checkpoint: shapes are of public models, weights random, made on the card.
"""
