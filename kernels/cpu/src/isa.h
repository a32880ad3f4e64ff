// Which instruction sets this processor and kernel offer, and the kernels built for each.
#pragma once
#include <string>
#include <vector>
#include "kernels.h"

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool emulated;  // never picked by itself
};

// Best first.
const std::vector<Isa>& built_isas();

// Empty when it can run here, else the reason why not. Asks the kernel for AMX's tile state if need be.
std::string why_not(const Isa& isa);
