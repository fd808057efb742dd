"""Parts of attention kernels: tile scheduler, work partition, layouts, softmax and epilogue."""
