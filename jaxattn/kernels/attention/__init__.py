"""Parts that attention kernels share: split-KV schedule, work iterator, layouts, softmax and
epilogue."""
