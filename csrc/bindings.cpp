// SPDX-License-Identifier: Apache-2.0
// The module, its shared helpers, and the classes that describe memory.
#include "bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <tuple>

#include "layout.h"

namespace pega {

BufferView::BufferView(nb::handle object) {
  if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0)
    throw nb::python_error();
}

size_t count_moves(const BufferView& buffer) {
  const Py_buffer& b = buffer.info();
  std::string format = b.format != nullptr ? b.format : "B";
  if (!format.empty() && std::strchr("@=<", format[0]) != nullptr) format.erase(0, 1);
  const bool bytes = b.itemsize == 1 && b.ndim == 1;
  const bool rows = b.itemsize == 4 && (format == "I" || format == "L") && b.ndim == 2 && b.shape[1] == 3;
  if (!(bytes || rows) || buffer.nbytes() % sizeof(Move) != 0)
    throw std::invalid_argument(
        "moves must be a C-contiguous uint32 array [n, 3] of (group, block, slot), or its bytes; "
        "given: " +
        std::to_string(b.ndim) + " dimensions of format '" + format + "', " + std::to_string(b.len) +
        " bytes");
  return buffer.nbytes() / sizeof(Move);
}

size_t count_keys(const BufferView& buffer, size_t key_bytes) {
  if (buffer.nbytes() % key_bytes != 0)
    throw std::invalid_argument("joined keys of " + std::to_string(key_bytes) + " bytes each cannot have " +
                                std::to_string(buffer.nbytes()) + " bytes");
  return buffer.nbytes() / key_bytes;
}

const std::shared_ptr<HostPool>& PoolHandle::get() const {
  if (pool == nullptr) throw std::invalid_argument("this HostPool is closed");
  return pool;
}

void bind_memory(nb::module_& m) {
  nb::class_<Segment>(m, "Segment")
      .def(
          "__init__",
          [](Segment* s, uint64_t base, uint64_t block_stride, uint64_t bytes, uint64_t allocation) {
            new (s) Segment{base, block_stride, bytes, allocation};
          },
          nb::arg("base"), nb::arg("block_stride"), nb::arg("bytes"), nb::arg("allocation"))
      .def_ro("base", &Segment::base)
      .def_ro("block_stride", &Segment::block_stride)
      .def_ro("bytes", &Segment::bytes)
      .def_ro("allocation", &Segment::allocation);

  nb::class_<GroupLayout>(m, "GroupLayout")
      .def(nb::init<std::vector<Segment>, uint64_t>(), nb::arg("segments"), nb::arg("num_blocks"))
      .def_prop_ro("slot_bytes", &GroupLayout::slot_bytes)
      .def_prop_ro("num_blocks", &GroupLayout::num_blocks)
      .def_prop_ro("segments_per_block", [](const GroupLayout& g) { return g.segments().size(); });

  nb::class_<PoolHandle>(m, "HostPool")
      .def(
          "__init__",
          [](PoolHandle* self, const std::vector<std::pair<uint64_t, uint64_t>>& classes, bool prefault) {
            std::vector<SlotClass> c;
            for (const auto& [slot_bytes, slots] : classes) c.push_back({slot_bytes, slots});
            nb::gil_scoped_release release;  // prefaulting takes a while
            new (self) PoolHandle{std::make_shared<HostPool>(std::move(c), prefault)};
          },
          nb::arg("slot_classes"), nb::arg("prefault") = false)
      .def_static(
          "attach",
          [](int data_fd, int table_fd, const std::vector<std::pair<uint64_t, uint64_t>>& classes) {
            std::vector<SlotClass> c;
            for (const auto& [slot_bytes, slots] : classes) c.push_back({slot_bytes, slots});
            return PoolHandle{std::make_shared<HostPool>(data_fd, table_fd, std::move(c))};
          },
          nb::arg("data_fd"), nb::arg("table_fd"), nb::arg("slot_classes"))
      .def_prop_ro("data_fd", [](const PoolHandle& p) { return p.get()->data_fd(); })
      .def_prop_ro("table_fd", [](const PoolHandle& p) { return p.get()->table_fd(); })
      .def_prop_ro("address", [](const PoolHandle& p) { return reinterpret_cast<uint64_t>(p.get()->data()); })
      .def_prop_ro("nbytes", [](const PoolHandle& p) { return p.get()->nbytes(); })
      .def(
          "slot_address",
          [](const PoolHandle& p, uint32_t slot_class, uint64_t slot) {
            p.get()->check_slot(slot_class, slot);
            return reinterpret_cast<uint64_t>(p.get()->slot(slot_class, slot));
          },
          nb::arg("slot_class"), nb::arg("slot"))
      .def(
          "slot_view",
          [](const PoolHandle& p, uint32_t slot_class, uint64_t slot) {
            p.get()->check_slot(slot_class, slot);
            using Share = std::shared_ptr<HostPool>;
            nb::capsule share(new Share(p.get()), [](void* s) noexcept { delete static_cast<Share*>(s); });
            return nb::ndarray<nb::memview, uint8_t, nb::ndim<1>>(
                p.get()->slot(slot_class, slot), {p.get()->classes()[slot_class].slot_bytes}, share);
          },
          nb::arg("slot_class"), nb::arg("slot"))
      .def(
          "slot_state",
          [](const PoolHandle& p, uint32_t slot_class, uint64_t slot) {
            p.get()->check_slot(slot_class, slot);
            const SlotEntry& e = p.get()->entry(slot_class, slot);
            const uint64_t generation = e.generation.load(std::memory_order_acquire);
            const size_t key_bytes = std::min<size_t>(e.key_bytes, kMaxKeyBytes);
            return std::make_tuple(generation, nb::bytes(reinterpret_cast<const char*>(e.key), key_bytes),
                                   e.length);
          },
          nb::arg("slot_class"), nb::arg("slot"))
      .def("close", [](PoolHandle& p) { p.pool.reset(); });

  m.def(
      "plan",
      [](std::vector<GroupLayout> layouts, const PoolHandle& pool, std::vector<uint32_t> group_classes,
         nb::handle moves, uint64_t max_range_bytes) {
        const BufferView view(moves);
        std::vector<Move> rows(count_moves(view));
        if (!rows.empty()) std::memcpy(rows.data(), view.data(), view.nbytes());
        const Geometry geometry(pool.get(), std::move(layouts), std::move(group_classes));
        geometry.check(rows.data(), rows.size());
        std::vector<uint32_t> order;
        std::vector<Range> ranges;
        {
          nb::gil_scoped_release release;
          Planner(geometry).plan(rows.data(), rows.size(), &order, &ranges);
          if (max_range_bytes != 0) ranges = split(ranges, max_range_bytes);
        }
        std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> out;
        out.reserve(ranges.size());
        for (const Range& r : ranges) out.emplace_back(r.device, r.host, r.bytes);
        return out;
      },
      nb::arg("layouts"), nb::arg("pool"), nb::arg("group_classes"), nb::arg("moves"),
      nb::arg("max_range_bytes") = 0);
}

}  // namespace pega

NB_MODULE(_native, m) {
  // An engine that could not drain is leaked on purpose; its user has been told by close().
  nb::set_leak_warnings(false);
  pega::bind_memory(m);
  pega::bind_slot_table(m);
  pega::bind_index(m);
  pega::bind_policy(m);
  pega::bind_engine(m);
  pega::bind_cuda(m);
#ifdef PEGA_FAULTS
  pega::bind_faults(m);
#endif
}
