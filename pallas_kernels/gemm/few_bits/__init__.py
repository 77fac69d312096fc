"""Products with weights in few bits, in fp8, int8 and int4."""
