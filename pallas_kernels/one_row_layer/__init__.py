"""A whole decoder layer of one row in one launch: `mosaic.decoder_layer`."""
