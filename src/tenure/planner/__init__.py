"""What a machine will hold, told before anything is loaded: the allocator's own arithmetic over a model's anatomy."""
