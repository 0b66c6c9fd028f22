// SPDX-License-Identifier: Apache-2.0
// What the migration agent has of native code: the slot table of its pool, and the pools of its neighbours.
#include <nanobind/stl/shared_ptr.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "peer_pool.h"
#include "slot_table.h"

namespace pega {
namespace {

template <typename T>
std::vector<T> numbers(nb::handle bytes, const char* what) {
  const BufferView view(bytes);
  if (view.nbytes() % sizeof(T) != 0)
    throw std::invalid_argument(std::string(what) + " must be the bytes of " + std::to_string(sizeof(T)) +
                                "-byte numbers; given: " + std::to_string(view.nbytes()) + " bytes");
  std::vector<T> out(view.nbytes() / sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), view.data(), view.nbytes());  // any alignment
  return out;
}

template <typename T>
nb::bytes as_bytes(const std::vector<T>& v, size_t n) {
  return nb::bytes(v.data(), n * sizeof(T));
}

void same_count(const char* what, size_t given, size_t slots) {
  if (given != slots)
    throw std::invalid_argument(std::to_string(slots) + " slots need as many " + what +
                                "; given: " + std::to_string(given));
}

}  // namespace

void bind_slot_table(nb::module_& m) {
  nb::class_<SlotTable>(m, "SlotTable")
      .def(
          "__init__",
          [](SlotTable* self, const PoolHandle& pool, uint32_t slot_class, uint32_t key_bytes) {
            new (self) SlotTable(pool.get(), slot_class, key_bytes);
          },
          nb::arg("pool"), nb::arg("slot_class"), nb::arg("key_bytes"))
      .def(
          "find",
          [](SlotTable& t, nb::handle joined) {
            const BufferView keys(joined);
            const size_t n = count_keys(keys, t.key_bytes());
            std::vector<uint32_t> slots(n);
            std::vector<uint64_t> generations(n);
            size_t found;
            {
              nb::gil_scoped_release release;  // a large table takes a while to look through
              found = t.find(static_cast<const uint8_t*>(keys.data()), n, slots.data(), generations.data());
            }
            return nb::make_tuple(as_bytes(slots, found), as_bytes(generations, found));
          },
          nb::arg("joined"))
      .def(
          "still",
          [](const SlotTable& t, nb::handle slots, nb::handle generations) {
            const auto s = numbers<uint32_t>(slots, "slots");
            const auto g = numbers<uint64_t>(generations, "generations");
            same_count("generations", g.size(), s.size());
            std::vector<uint8_t> out(s.size());
            t.still(s.data(), g.data(), s.size(), out.data());
            return as_bytes(out, out.size());
          },
          nb::arg("slots"), nb::arg("generations"))
      .def(
          "holding",
          [](const SlotTable& t, nb::handle slots, nb::handle joined) {
            const auto s = numbers<uint32_t>(slots, "slots");
            const BufferView keys(joined);
            same_count("keys", count_keys(keys, t.key_bytes()), s.size());
            std::vector<uint64_t> out(s.size());
            t.holding(s.data(), static_cast<const uint8_t*>(keys.data()), s.size(), out.data());
            return as_bytes(out, out.size());
          },
          nb::arg("slots"), nb::arg("joined"))
      .def(
          "begin",
          [](SlotTable& t, nb::handle slots) {
            const auto s = numbers<uint32_t>(slots, "slots");
            t.begin(s.data(), s.size());
          },
          nb::arg("slots"))
      .def(
          "end",
          [](SlotTable& t, nb::handle slots, nb::handle joined, uint32_t length) {
            const auto s = numbers<uint32_t>(slots, "slots");
            const BufferView keys(joined);
            same_count("keys", count_keys(keys, t.key_bytes()), s.size());
            t.end(s.data(), static_cast<const uint8_t*>(keys.data()), s.size(), length);
          },
          nb::arg("slots"), nb::arg("joined"), nb::arg("length"))
      .def(
          "end_empty",
          [](SlotTable& t, nb::handle slots) {
            const auto s = numbers<uint32_t>(slots, "slots");
            t.end(s.data(), nullptr, s.size(), 0);
          },
          nb::arg("slots"))
      .def(
          "lease",
          [](SlotTable& t, nb::handle slots, double seconds) {
            const auto s = numbers<uint32_t>(slots, "slots");
            const uint64_t until = seconds > 0 ? monotonic_ns() + static_cast<uint64_t>(seconds * 1e9) : 0;
            t.lease(s.data(), s.size(), until);
          },
          nb::arg("slots"), nb::arg("seconds"))
      .def(
          "forget",
          [](SlotTable& t, nb::handle slots) {
            const auto s = numbers<uint32_t>(slots, "slots");
            t.forget(s.data(), s.size());
          },
          nb::arg("slots"))
      .def("forget_all", &SlotTable::forget_all)
      .def(
          "distrust",
          [](SlotTable& t, nb::handle slots) {
            const auto s = numbers<uint32_t>(slots, "slots");
            t.distrust(s.data(), s.size());
          },
          nb::arg("slots"));

  nb::class_<PeerPool>(m, "PeerPool")
      .def(nb::init<int, uint64_t, uint64_t, uint64_t>(), nb::arg("fd"), nb::arg("offset"),
           nb::arg("slot_bytes"), nb::arg("slots"))
      .def(
          "read",
          [](const PeerPool& p, nb::handle theirs, const PoolHandle& to, uint32_t slot_class, nb::handle ours,
             unsigned threads) {
            const auto from = numbers<uint32_t>(theirs, "slots"), into = numbers<uint32_t>(ours, "slots");
            same_count("slots of ours", into.size(), from.size());
            const std::shared_ptr<HostPool> pool = to.get();
            nb::gil_scoped_release release;
            return p.read(from.data(), *pool, slot_class, into.data(), from.size(), threads);
          },
          nb::arg("theirs"), nb::arg("to"), nb::arg("slot_class"), nb::arg("ours"), nb::arg("threads"));
}

}  // namespace pega
