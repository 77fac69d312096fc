"""The products of a decode step of few rows, with what lies between them done as they end.

RMSNorm takes no kernel of its own: ``add_product`` leaves the rows it has summed undivided, with
partial sums of their squares, and whoever reads them next divides its own result.
"""
