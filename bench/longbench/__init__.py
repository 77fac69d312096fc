"""Long documents and questions about them, in the form of LongBench (Bai et al., ACL 2024)."""
