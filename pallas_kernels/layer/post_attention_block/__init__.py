"""What a decoder layer computes from one attention to the next, as one launch for few rows."""
