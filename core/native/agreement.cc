#include "agreement.h"

#include <algorithm>
#include <map>

namespace polyccl {
namespace {

constexpr uint16_t kAgreementChannel = 3;

// Rounds of one agreement; they keep its messages apart.
enum Round : uint32_t { kToHead = 0, kSummaries = 1, kTables = 2, kVerdict = 3, kWholeTable = 4 };

uint64_t digest(const std::vector<uint64_t>& words) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (uint64_t word : words) {
    for (int shift = 0; shift < 64; shift += 8) hash = (hash ^ ((word >> shift) & 0xff)) * 0x100000001b3;
  }
  return hash;
}

std::string call_name(const Fingerprint& f) {
  const Operation* row = find_operation(f.kind);
  return row == nullptr ? "nothing" : std::string(row->name);
}

}  // namespace

Fingerprint Fingerprint::of(const Call& call) {
  Fingerprint f;
  f.kind = call.kind();
  if (f.kind == POLYCCL_KIND_BARRIER) return f;
  f.dtype = call.dtype;
  f.strict = call.strict ? 1 : 0;
  if (call.row->reduces) f.reduction = call.reduction;
  if (call.row->rooted) f.root = call.peer;
  if (!call.row->ragged) f.count = call.count;
  // Each rank of an all_to_all_v has counts of its own.
  if (call.row->ragged && f.kind != POLYCCL_KIND_ALL_TO_ALL_V) {
    f.counts_digest = digest(call.row->input == Shape::kBlocks ? call.input.counts : call.output.counts);
  }
  return f;
}

// The messages of one agreement: posted, then waited for together.
struct Agreement::Exchange {
  Agreement& self;
  uint64_t sequence;
  Deadline deadline;
  const Interrupted& interrupted;
  std::vector<std::pair<int, std::shared_ptr<LinkRequest>>> pending{};

  Tag tag(Round round) const { return {self.tag_group_, sequence, round, 0, kAgreementChannel}; }

  void send(int peer, Round round, const void* memory, size_t bytes) {
    pending.emplace_back(peer, self.group_.send(peer, tag(round), memory, bytes));
  }

  void recv(int peer, Round round, void* memory, size_t bytes) {
    pending.emplace_back(peer, self.group_.recv(peer, tag(round), memory, bytes));
  }

  void wait(const std::string& what) {
    const auto all_done = [this] {
      return std::all_of(pending.begin(), pending.end(), [](const auto& p) { return p.second->done(); });
    };
    const bool whole = Link::instance().wait(all_done, deadline, interrupted);
    std::vector<int> missing;
    for (const auto& [peer, request] : pending) {
      if (!request->done()) {
        missing.push_back(peer);
      } else if (request->error()) {
        throw *request->error();
      }
    }
    if (!whole && !expired(deadline)) throw InterruptedWait();
    if (!whole && !missing.empty()) {
      throw Error(Code::kTimeout, "timed out: " + self.ranks_text(missing) + " never entered " + what);
    }
    pending.clear();
  }
};

Agreement::Agreement(LinkGroup& group, uint64_t tag_group, int rank, const std::vector<std::vector<int>>& islands,
                     const std::vector<std::string>& members)
    : group_(group), tag_group_(tag_group), rank_(rank), islands_(islands), members_(members) {
  for (size_t i = 0; i < islands_.size(); ++i) {
    if (std::find(islands_[i].begin(), islands_[i].end(), rank) != islands_[i].end()) island_ = i;
  }
}

void Agreement::agree(const Fingerprint& mine, Scope scope, Deadline deadline, const Interrupted& interrupted) {
  ++sequence_;
  if (islands_[island_].front() == rank_) {
    as_head(mine, scope, deadline, interrupted);
  } else {
    as_member(mine, scope, deadline, interrupted);
  }
}

void Agreement::as_member(const Fingerprint& mine, Scope scope, Deadline deadline, const Interrupted& interrupted) {
  Exchange exchange{*this, sequence_, deadline, interrupted};
  const int head = islands_[island_].front();
  uint64_t differs = 0;
  exchange.recv(head, kVerdict, &differs, sizeof differs);
  exchange.send(head, kToHead, &mine, sizeof mine);
  exchange.wait(call_name(mine));
  if (differs == 0) return;
  Table table(scope == Scope::kAll ? members_.size() : islands_[island_].size());
  exchange.recv(head, kWholeTable, table.data(), table.size() * sizeof(Fingerprint));
  exchange.wait(call_name(mine));
  throw Error(Code::kMismatch, difference(table));
}

Agreement::Table Agreement::gather_island(const Fingerprint& mine, Exchange& exchange) {
  const auto& ranks = islands_[island_];
  Table table(ranks.size());
  table[0] = mine;
  for (size_t i = 1; i < ranks.size(); ++i) exchange.recv(ranks[i], kToHead, &table[i], sizeof(Fingerprint));
  exchange.wait(call_name(mine));
  return table;
}

void Agreement::as_head(const Fingerprint& mine, Scope scope, Deadline deadline, const Interrupted& interrupted) {
  Exchange exchange{*this, sequence_, deadline, interrupted};
  Table table = gather_island(mine, exchange);
  const auto uniform = [](const Table& t) {
    return std::all_of(t.begin(), t.end(), [&](const auto& f) { return f == t[0]; });
  };
  uint64_t differs = uniform(table) && mine.refused == 0 ? 0 : 1;
  if (scope == Scope::kAll && islands_.size() > 1) {
    const Summary own{mine, differs == 0};
    std::vector<Summary> summaries(islands_.size(), own);
    for (size_t i = 0; i < islands_.size(); ++i) {
      if (i == island_) continue;
      exchange.recv(islands_[i].front(), kSummaries, &summaries[i], sizeof(Summary));
      exchange.send(islands_[i].front(), kSummaries, &own, sizeof own);
    }
    exchange.wait(call_name(mine));
    for (const Summary& s : summaries) differs |= s.uniform == 0 || !(s.first == summaries[0].first) ? 1 : 0;
  }
  Table whole = table;
  if (differs != 0 && scope == Scope::kAll) {
    whole.assign(members_.size(), {});
    std::vector<Table> tables(islands_.size());
    for (size_t i = 0; i < islands_.size(); ++i) {
      tables[i] = i == island_ ? table : Table(islands_[i].size());
      if (i == island_) continue;
      exchange.recv(islands_[i].front(), kTables, tables[i].data(), tables[i].size() * sizeof(Fingerprint));
      exchange.send(islands_[i].front(), kTables, table.data(), table.size() * sizeof(Fingerprint));
    }
    exchange.wait(call_name(mine));
    for (size_t i = 0; i < islands_.size(); ++i) {
      for (size_t j = 0; j < islands_[i].size(); ++j) whole[static_cast<size_t>(islands_[i][j])] = tables[i][j];
    }
  }
  for (size_t i = 1; i < islands_[island_].size(); ++i) {
    exchange.send(islands_[island_][i], kVerdict, &differs, sizeof differs);
    if (differs != 0)
      exchange.send(islands_[island_][i], kWholeTable, whole.data(), whole.size() * sizeof(Fingerprint));
  }
  exchange.wait(call_name(mine));
  if (differs != 0) throw Error(Code::kMismatch, difference(whole));
}

std::string Agreement::ranks_text(const std::vector<int>& ranks) const {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + members_[static_cast<size_t>(rank)];
  return text;
}

// "count differs: 4 on rank 0 (...); 5 on rank 1 (...)", for every field that differs.
std::string Agreement::difference(const Table& table) const {
  const bool all = table.size() == members_.size();
  const auto rank_of = [&](size_t i) { return all ? static_cast<int>(i) : islands_[island_][i]; };
  std::string text;
  const auto compare = [&](const std::string& field, const auto& value_of) {
    std::map<std::string, std::vector<int>> holders;
    for (size_t i = 0; i < table.size(); ++i) holders[value_of(table[i])].push_back(rank_of(i));
    if (holders.size() < 2) return;
    text += (text.empty() ? "" : ". ") + field + " differs: ";
    bool first = true;
    for (const auto& [value, ranks] : holders) {
      text += (first ? "" : "; ") + value + " on " + ranks_text(ranks);
      first = false;
    }
  };
  std::vector<int> refusers;
  for (size_t i = 0; i < table.size(); ++i) {
    if (table[i].refused != 0) refusers.push_back(rank_of(i));
  }
  if (!refusers.empty()) return "the call of " + ranks_text(refusers) + " was refused there, so no rank enters it";
  compare("the operation", call_name);
  if (!text.empty()) return text + ". All ranks must call the same operations in the same order";
  compare("dtype", [](const Fingerprint& f) { return std::string(dtype_name(f.dtype)); });
  compare("count", [](const Fingerprint& f) { return std::to_string(f.count) + " elements"; });
  compare("the list of counts", [](const Fingerprint& f) { return "digest " + std::to_string(f.counts_digest); });
  compare("reduction", [](const Fingerprint& f) { return std::string(reduction_name(f.reduction)); });
  compare("the hint 'deterministic'",
          [](const Fingerprint& f) { return std::string(f.strict != 0 ? "strict" : "unset"); });
  compare("the form",
          [](const Fingerprint& f) { return std::string(f.native != 0 ? "one tensor" : "a list of tensors"); });
  compare("root", [](const Fingerprint& f) { return std::to_string(f.root); });
  return text;
}

}  // namespace polyccl
