"""Kernels of the fused linear on a GPU. Nothing here is imported unless it is asked for.

| module | what it is |
| --- | --- |
| `table` | the slices of one unit, in order of arrival, as the kernels read them |
| `gemm_forward`, `gemm_dgrad`, `gemm_wgrad` | one persistent Triton kernel each; `device_code`, `launching` are what they share |
| `by_slices` | the same three by cuBLAS (any BLAS), one slice after the other: the baseline and the fallback |
| `tiles` | shapes of tiles: the candidates among which is measured, the defaults where nothing can be |
| `choice`, `measured`, `trial` | which backend and tiles for which shape: the decision, its cache on disk, the measurement |
| `ops` | all of it as registered torch ops |
| `inbox_sum`, `publish`, `nvrtc` | sums of partials and packing of shards, in CUDA C++ compiled at run time |

The import direction is table, tiles < device_code < launching < gemm_* ; by_slices < choice < ops. Only device_code, launching
and gemm_* import triton.
"""
