// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "bindings.h"
#include "index.h"

namespace pega {
namespace {

// A bytes object, filled in place: one allocation and no copy for thousands of keys or slots.
template <typename Fill>
nb::bytes make_bytes(size_t n, Fill fill) {
  nb::object out = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(n)));
  if (!out.is_valid()) throw nb::python_error();
  fill(PyBytes_AS_STRING(out.ptr()));
  return nb::borrow<nb::bytes>(out);
}

template <typename Fill>
nb::bytes make_slots(size_t n, Fill fill) {
  return make_bytes(n * sizeof(uint32_t), [&](char* out) { fill(reinterpret_cast<uint32_t*>(out)); });
}

// b"".join(keys[begin:end]), where each must have key_bytes. Thousands of small objects lie all over memory:
// they are fetched well before they are copied, which takes half the time.
nb::bytes join_keys(nb::handle keys, size_t begin, size_t end, size_t key_bytes) {
  constexpr size_t kAhead = 24;
  const nb::object fast = nb::steal(PySequence_Fast(keys.ptr(), "keys must be a sequence of bytes"));
  if (!fast.is_valid()) throw nb::python_error();
  end = std::min(end, static_cast<size_t>(PySequence_Fast_GET_SIZE(fast.ptr())));
  PyObject* const* items = PySequence_Fast_ITEMS(fast.ptr());
  return make_bytes(begin < end ? (end - begin) * key_bytes : 0, [&](char* out) {
    for (size_t i = begin; i < end; ++i, out += key_bytes) {
      if (i + kAhead < end) {
        __builtin_prefetch(items[i + kAhead]);
        __builtin_prefetch(reinterpret_cast<const char*>(items[i + kAhead]) + 64);
      }
      if (!PyBytes_Check(items[i]) || static_cast<size_t>(PyBytes_GET_SIZE(items[i])) != key_bytes)
        throw std::invalid_argument("key " + std::to_string(i) + " is not " + std::to_string(key_bytes) +
                                    " bytes");
      std::memcpy(out, PyBytes_AS_STRING(items[i]), key_bytes);
    }
  });
}

// Rows of (group, block, slot) of parts of (group, block ids, uint32 slots), as engines take them.
nb::bytes move_rows(nb::handle parts) {
  struct Part {
    uint32_t group;
    nb::object blocks;
    BufferView slots;
  };
  std::vector<Part> taken;
  size_t total = 0;
  taken.reserve(nb::len(parts));
  for (nb::handle part : parts) {
    const auto entry = nb::cast<nb::tuple>(part);
    if (entry.size() != 3) throw std::invalid_argument("a part is (group, blocks, slots)");
    nb::object blocks = nb::steal(PySequence_Fast(entry[1].ptr(), "blocks must be a sequence of ints"));
    if (!blocks.is_valid()) throw nb::python_error();
    taken.push_back({nb::cast<uint32_t>(entry[0]), blocks, BufferView(entry[2])});
    const size_t n = static_cast<size_t>(PySequence_Fast_GET_SIZE(blocks.ptr()));
    if (taken.back().slots.nbytes() != n * sizeof(uint32_t))
      throw std::invalid_argument(std::to_string(n) + " blocks and " +
                                  std::to_string(taken.back().slots.nbytes()) + " bytes of slots");
    total += n;
  }
  return make_slots(3 * total, [&](uint32_t* row) {
    for (const Part& part : taken) {
      PyObject* const* blocks = PySequence_Fast_ITEMS(part.blocks.ptr());
      const auto* slots = static_cast<const char*>(part.slots.data());
      for (size_t i = 0; i < part.slots.nbytes() / sizeof(uint32_t); ++i, row += 3) {
        row[0] = part.group;
        row[1] = nb::cast<uint32_t>(nb::handle(blocks[i]));
        std::memcpy(row + 2, slots + i * sizeof(uint32_t), sizeof(uint32_t));
      }
    }
  });
}

struct Keys {
  Keys(const SlotIndex& index, nb::handle joined, size_t start = 0)
      : view(joined), count(count_keys(view, index.key_bytes())) {
    if (start > count)
      throw std::invalid_argument("start is " + std::to_string(start) + "; there are " +
                                  std::to_string(count) + " keys");
    data = static_cast<const uint8_t*>(view.data()) + start * index.key_bytes();
    count -= start;
  }
  BufferView view;
  size_t count;
  const uint8_t* data;
};

struct Slots {
  explicit Slots(nb::handle bytes) {
    const BufferView view(bytes);
    if (view.nbytes() % sizeof(uint32_t) != 0)
      throw std::invalid_argument("slots must be the bytes of uint32; " + std::to_string(view.nbytes()) +
                                  " bytes are not");
    ids.resize(view.nbytes() / sizeof(uint32_t));
    if (!ids.empty()) std::memcpy(ids.data(), view.data(), view.nbytes());  // any alignment
  }
  std::vector<uint32_t> ids;
};

}  // namespace

void bind_index(nb::module_& m) {
  m.def("move_rows", &move_rows, nb::arg("parts"));
  nb::class_<SlotIndex>(m, "SlotIndex")
      .def(nb::init<const std::vector<uint32_t>&, std::vector<uint32_t>, uint32_t>(),
           nb::arg("slots_per_class"), nb::arg("group_classes"), nb::arg("key_bytes") = 32)
      .def_prop_ro_static("NO_SLOT", [](nb::handle) { return SlotIndex::kNoSlot; })
      .def_prop_ro("key_bytes", &SlotIndex::key_bytes)
      .def(
          "join",
          [](const SlotIndex& self, nb::handle keys, size_t begin, size_t end) {
            return join_keys(keys, begin, end, self.key_bytes());
          },
          nb::arg("keys"), nb::arg("begin"), nb::arg("end"))
      .def(
          "match_and_pin",
          [](SlotIndex& self, uint64_t group, nb::handle joined, size_t start) {
            const Keys keys(self, joined, start);
            size_t length = 0;
            nb::bytes slots = make_slots(keys.count, [&](uint32_t* out) {
              length = self.match_and_pin(group, keys.data, keys.count, out);
            });
            return length == keys.count ? slots : nb::bytes(slots.c_str(), length * sizeof(uint32_t));
          },
          nb::arg("group"), nb::arg("joined"), nb::arg("start") = 0)
      .def(
          "match",
          [](SlotIndex& self, uint64_t group, nb::handle joined, size_t start) {
            const Keys keys(self, joined, start);
            return self.match(group, keys.data, keys.count);
          },
          nb::arg("group"), nb::arg("joined"), nb::arg("start") = 0)
      .def(
          "contains",
          [](SlotIndex& self, uint64_t group, nb::handle joined) {
            const Keys keys(self, joined);
            std::vector<SlotIndex::Presence> out(keys.count);
            self.contains(group, keys.data, keys.count, out.data());
            return nb::bytes(reinterpret_cast<const char*>(out.data()), out.size());
          },
          nb::arg("group"), nb::arg("joined"))
      .def(
          "pin",
          [](SlotIndex& self, uint64_t group, nb::handle joined) {
            const Keys keys(self, joined);
            return make_slots(keys.count,
                              [&](uint32_t* out) { self.pin(group, keys.data, keys.count, out); });
          },
          nb::arg("group"), nb::arg("joined"))
      .def(
          "unpin",
          [](SlotIndex& self, uint64_t group, nb::handle slots) {
            const Slots s(slots);
            self.unpin(group, s.ids.data(), s.ids.size());
          },
          nb::arg("group"), nb::arg("slots"))
      .def(
          "reserve",
          [](SlotIndex& self, uint64_t group, nb::handle joined, int64_t near) {
            const Keys keys(self, joined);
            return make_slots(keys.count,
                              [&](uint32_t* out) { self.reserve(group, keys.data, keys.count, near, out); });
          },
          nb::arg("group"), nb::arg("joined"), nb::arg("near") = -1)
      .def(
          "publish",
          [](SlotIndex& self, uint64_t group, nb::handle slots) {
            const Slots s(slots);
            self.publish(group, s.ids.data(), s.ids.size());
          },
          nb::arg("group"), nb::arg("slots"))
      .def(
          "abandon",
          [](SlotIndex& self, uint64_t group, nb::handle slots) {
            const Slots s(slots);
            self.abandon(group, s.ids.data(), s.ids.size());
          },
          nb::arg("group"), nb::arg("slots"))
      .def(
          "disown",
          [](SlotIndex& self, uint64_t group, nb::handle slots) {
            const Slots s(slots);
            self.disown(group, s.ids.data(), s.ids.size());
          },
          nb::arg("group"), nb::arg("slots"))
      .def(
          "honour_leases",
          [](SlotIndex& self, uint32_t slot_class, const PoolHandle& pool) {
            self.honour_leases(slot_class, pool.get());
          },
          nb::arg("slot_class"), nb::arg("pool"))
      .def("reset", &SlotIndex::reset)
      .def(
          "record_changes", [](SlotIndex& self, size_t limit) { self.changes().record(limit); },
          nb::arg("limit"))
      .def("take_changes",
           [](SlotIndex& self) {
             static const char* const kNames[] = {"stored", "removed", "cleared"};
             nb::list out;
             for (const IndexChanges::Run& run : self.changes().take())
               out.append(nb::make_tuple(kNames[static_cast<size_t>(run.kind)], run.group,
                                         nb::bytes(run.keys.data(), run.keys.size())));
             return out;
           })
      .def_prop_ro("version", &SlotIndex::version)
      .def_prop_ro("evictions", &SlotIndex::evictions)
      .def("totals",
           [](const SlotIndex& self) {
             const SlotIndex::Counts c = self.totals();
             return nb::make_tuple(c.free, c.reserved, c.ready, c.pinned, c.total);
           })
      .def(
          "counts",
          [](const SlotIndex& self, uint64_t slot_class) {
            const SlotIndex::Counts c = self.counts(slot_class);
            nb::dict out;
            out["free"] = c.free;
            out["reserved"] = c.reserved;
            out["ready"] = c.ready;
            out["pinned"] = c.pinned;
            out["total"] = c.total;
            return out;
          },
          nb::arg("slot_class") = 0);
}

}  // namespace pega
