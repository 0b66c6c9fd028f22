// SPDX-License-Identifier: Apache-2.0
// What the binding files share. Each bind_*() adds its classes to the module; bindings.cpp calls them all.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "planner.h"
#include "pool.h"
#include "types.h"

namespace nb = nanobind;

namespace pega {

void bind_memory(nb::module_& m);      // Segment, GroupLayout, HostPool, plan
void bind_slot_table(nb::module_& m);  // SlotTable, PeerPool; needs HostPool to be bound
void bind_index(nb::module_& m);       // SlotIndex; needs SlotTable to be bound
void bind_policy(nb::module_& m);      // Policy, TransferShape, TransferDecision, DeviceProfile, decide
void bind_engine(nb::module_& m);      // Device, HostDevice, SimDevice, JobResult, TransferEngine
void bind_cuda(nb::module_& m);        // CudaDevice, cuda_available; needs Device to be bound
void bind_faults(nb::module_& m);      // FaultDevice, with PEGA_FAULTS; needs Device to be bound

// Throw std::invalid_argument naming what is allowed.
Direction parse_direction(const std::string& name);
Backend parse_backend(const std::string& name);
Objective parse_objective(const std::string& name);

// HostPool as Python sees it: close() gives up its share; views and engines keep theirs.
struct PoolHandle {
  std::shared_ptr<HostPool> pool;
  const std::shared_ptr<HostPool>& get() const;  // throws std::invalid_argument once closed
};

// A C-contiguous view of any object with the buffer protocol, for as long as this lives.
class BufferView {
 public:
  explicit BufferView(nb::handle object);  // throws the Python error
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(BufferView&& other) noexcept : view_(other.view_) { other.view_ = {}; }
  BufferView& operator=(BufferView&&) = delete;
  const void* data() const { return view_.buf; }
  size_t nbytes() const { return static_cast<size_t>(view_.len); }
  const Py_buffer& info() const { return view_; }

 private:
  Py_buffer view_;
};

// Number of rows of a buffer of moves: uint32 [n, 3], or its bytes. Throws std::invalid_argument.
size_t count_moves(const BufferView& buffer);

// Number of keys of `key_bytes` each in a buffer. Throws std::invalid_argument.
size_t count_keys(const BufferView& buffer, size_t key_bytes);

}  // namespace pega
