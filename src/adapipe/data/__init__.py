"""Corpora of bytes, and the microbatches that are cut from them."""

from adapipe.data.corpus import Corpus, load_corpus
from adapipe.data.sampler import HeldOut, Sampler, held_out_microbatches

__all__ = ["Corpus", "HeldOut", "Sampler", "held_out_microbatches", "load_corpus"]
