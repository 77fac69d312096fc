"""The bundled model: the checkpoint of a small Llama, and a demo that it can answer.

Its training, its tokenizer and its data generator are in ``bench/tables``.
"""
