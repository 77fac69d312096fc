"""All cases of the kernel benchmarks, a module for each kind of kernel."""
