"""What of vLLM rjax lacks, with what takes its place: `names` of the Python API, `options` and
`modules`; the last also finds the modules whose names rjax has elsewhere."""
