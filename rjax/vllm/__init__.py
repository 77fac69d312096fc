"""What of vLLM rjax lacks, with what takes its place: `names` of the Python API and `options`."""
