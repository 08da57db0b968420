"""Kernels for GPUs, each with a reference in torch of the same signature. Triton and CUDA are imported where asked for.

| module | what it is |
| --- | --- |
| `table` | the slices of one unit, in order of arrival, as the GEMMs read them |
| `gemm_forward`, `gemm_dgrad`, `gemm_wgrad` | one persistent Triton kernel each |
| `device_code`, `launching` | what these three share, on the device and on the host |
| `by_slices` | the same three by cuBLAS (any BLAS), one slice after the other: the baseline and the fallback |
| `tiles` | shapes of tiles: the candidates to measure among, the defaults where nothing can be measured |
| `choice`, `measured`, `trial` | which backend and tiles for which shape: the decision, its cache on disk, the measurement |
| `gemms`, `ops` | the three products by whatever was chosen; the same as registered torch ops |
| `inbox_sum`, `publish` | sums of partials and packing of shards, in CUDA C++ |
| `nvrtc`, `cubins`, `packs` | what those share: compilation at run time and its cache, arguments |

Only device_code, launching and gemm_* import triton; only nvrtc imports cuda.
"""
