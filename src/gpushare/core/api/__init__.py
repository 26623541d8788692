"""What users write and read: names, quantities, requests, decisions, GpuShare, GpuNode and their schemas."""
