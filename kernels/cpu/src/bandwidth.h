// What memory gives: the floor under every op that reads its weights once.
#pragma once
#include <cstdint>

// Reads a buffer with all threads of the pool. -> a checksum, so that no read can be left out.
uint64_t read_all(const char* buffer, int64_t num_bytes);
