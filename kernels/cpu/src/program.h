// The ops of a step, recorded once and run again in one call: what a CUDA graph is to a GPU.
//
// While a thread records, its op calls are noted instead of run. A later run makes the same calls, with two changes: as
// many rows (and sequences) as that step has, and its inputs (token ids, block tables, …) wherever they lie then. All
// else is as it was recorded: weights, the KV pool, and the intermediates, which have room for `max_rows`. Whatever an op
// decides by shapes, lengths or threads it decides again in each run.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

typedef uintptr_t Address;

class Unrecordable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One run's sizes, and its inputs in the order that `Program` was told of them.
struct StepInputs {
  int64_t num_rows, num_sequences;
  const Address* addresses;
  const int64_t* strides;
};

class Program {
 public:
  typedef std::function<void(const StepInputs&)> Call;

  // `inputs`: where each input lies while it is recorded, all different.
  Program(int64_t max_rows, std::vector<Address> inputs) : max_rows_(max_rows), inputs_(std::move(inputs)) {}
  ~Program() { end(); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // What this thread records, or null.
  static Program*& recording() {
    static thread_local Program* program = nullptr;
    return program;
  }
  void begin() {
    if (recording()) throw std::logic_error("this thread records already");
    recording() = this;
  }
  void end() {
    if (recording() == this) recording() = nullptr;
  }

  int64_t size() const { return static_cast<int64_t>(calls_.size()); }
  void add(Call call) { calls_.push_back(std::move(call)); }

  bool is_input(Address address) const {
    for (const Address input : inputs_)
      if (input == address) return true;
    return false;
  }
  size_t number_of(Address address) const {
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (inputs_[i] == address) return i;
    throw Unrecordable("an op reads something of the step that is none of its inputs");
  }
  void check_rows(int64_t num_rows) const {
    if (num_rows != max_rows_) throw Unrecordable("an op has other rows than the step");
  }

  void run(int64_t num_rows, int64_t num_sequences, const std::vector<Address>& addresses, const std::vector<int64_t>& strides) const {
    if (num_rows < 1 || num_rows > max_rows_ || num_sequences < 1 || num_sequences > num_rows)
      throw std::invalid_argument("a step must have from 1 to max_rows rows, and no more sequences than rows");
    if (addresses.size() != inputs_.size() || strides.size() != inputs_.size())
      throw std::invalid_argument("a step has other inputs than were recorded");
    const StepInputs step{num_rows, num_sequences, addresses.data(), strides.data()};
    for (const Call& call : calls_) call(step);
  }

 private:
  int64_t max_rows_;
  std::vector<Address> inputs_;
  std::vector<Call> calls_;
};

// What `recorded` and `recorded_over_sequences` do with the arguments of a call.
template <int... INPUTS, typename... A>
std::array<size_t, sizeof...(INPUTS)> find_inputs(const Program& program, const std::tuple<A...>& args) {
  size_t num_inputs = 0;  // any other address is taken as it is, so it must not be an input's
  std::apply([&](const auto&... each) {
    ((num_inputs += std::is_same_v<std::decay_t<decltype(each)>, Address> && program.is_input(static_cast<Address>(each))), ...);
  }, args);
  const std::array<size_t, sizeof...(INPUTS)> found{program.number_of(std::get<INPUTS>(args))...};
  if (num_inputs != sizeof...(INPUTS)) throw Unrecordable("an op takes an input of the step as something else");
  return found;
}

// The op, which is noted while the thread records. Argument ROWS counts the step's rows, INPUTS are addresses of inputs.
template <auto OP, int ROWS, int... INPUTS, typename... A>
auto recorded(void (*)(A...)) {
  return [](A... each) {
    Program* program = Program::recording();
    if (!program) return OP(each...);
    std::tuple<A...> args(each...);
    program->check_rows(std::get<ROWS>(args));
    const auto found = find_inputs<INPUTS...>(*program, args);
    program->add([args, found](const StepInputs& step) {
      std::tuple<A...> now = args;
      std::get<ROWS>(now) = step.num_rows;
      size_t i = 0;
      ((std::get<INPUTS>(now) = step.addresses[found[i++]]), ...);
      (void)i;
      std::apply(OP, now);
    });
  };
}

// The same where argument SEQUENCES counts the step's sequences and the first input is a table, with its stride after it.
template <auto OP, int SEQUENCES, int TABLE, int... INPUTS, typename... A>
auto recorded_over_sequences(void (*)(A...)) {
  return [](A... each) {
    Program* program = Program::recording();
    if (!program) return OP(each...);
    std::tuple<A...> args(each...);
    program->check_rows(std::get<SEQUENCES>(args));
    const auto found = find_inputs<TABLE, INPUTS...>(*program, args);
    program->add([args, found](const StepInputs& step) {
      std::tuple<A...> now = args;
      std::get<SEQUENCES>(now) = step.num_sequences;
      std::get<TABLE>(now) = step.addresses[found[0]];
      std::get<TABLE + 1>(now) = step.strides[found[0]];
      size_t i = 1;
      ((std::get<INPUTS>(now) = step.addresses[found[i++]]), ...);
      std::apply(OP, now);
    });
  };
}

inline void refuse_to_record() {
  if (Program::recording()) throw Unrecordable("an op of the step can't be recorded");
}

// An op that makes a step one that can't be recorded.
template <auto OP, typename Result, typename... A>
auto unrecorded(Result (*)(A...)) {
  return [](A... each) {
    refuse_to_record();
    return OP(each...);
  };
}
