"""A whole decoder layer of one row in one launch: `kernel.decoder_layer`."""
