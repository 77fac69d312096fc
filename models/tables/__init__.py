"""The bundled model: the checkpoint of a small Llama, and demo questions.

Its training, its tokenizer and its data generator are in ``bench/train_bundled_model``.
"""
