"""Rotary embedding and the write of new K and V into pages."""
