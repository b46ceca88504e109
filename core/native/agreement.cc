#include "agreement.h"

#include <algorithm>
#include <map>

namespace polyccl {
namespace {

constexpr uint16_t kAgreementChannel = 3;

// Rounds of one agreement; they keep its messages apart.
enum Round : uint32_t { kToHead = 0, kSummaries = 1, kTables = 2, kVerdict = 3, kWholeTable = 4 };

std::string call_name(const Fingerprint& f) {
  const Operation* row = find_operation(f.kind);
  return row == nullptr ? "nothing" : std::string(row->name);
}

}  // namespace

// The messages of one agreement: posted, then waited for together.
struct Agreement::Exchange {
  Agreement& self;
  uint64_t sequence;
  Deadline deadline;
  const Interrupted& interrupted;
  std::string what;
  std::vector<std::pair<int, std::shared_ptr<LinkRequest>>> pending{};

  Tag tag(Round round) const { return {self.tag_group_, sequence, round, 0, kAgreementChannel}; }

  void send(int peer, Round round, const void* memory, size_t bytes) {
    pending.emplace_back(peer, self.group_.send(peer, tag(round), memory, bytes));
  }

  void recv(int peer, Round round, void* memory, size_t bytes) {
    pending.emplace_back(peer, self.group_.recv(peer, tag(round), memory, bytes));
  }

  void wait() {
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
  mine_ = mine;
  Exchange exchange{*this, ++sequence_, deadline, interrupted, call_name(mine)};
  if (islands_[island_].front() == rank_) {
    as_head(scope, exchange);
  } else {
    as_member(scope, exchange);
  }
}

void Agreement::as_member(Scope scope, Exchange& exchange) {
  const int head = islands_[island_].front();
  exchange.recv(head, kVerdict, &differs_, sizeof differs_);
  exchange.send(head, kToHead, &mine_, sizeof mine_);
  exchange.wait();
  if (differs_ == 0) return;
  whole_.resize(scope == Scope::kAll ? members_.size() : islands_[island_].size());
  exchange.recv(head, kWholeTable, whole_.data(), whole_.size() * sizeof(Fingerprint));
  exchange.wait();
  throw Error(Code::kMismatch, difference(whole_));
}

void Agreement::as_head(Scope scope, Exchange& exchange) {
  const auto& ranks = islands_[island_];
  table_.assign(ranks.size(), mine_);
  for (size_t i = 1; i < ranks.size(); ++i) exchange.recv(ranks[i], kToHead, &table_[i], sizeof(Fingerprint));
  exchange.wait();
  const bool uniform = std::all_of(table_.begin(), table_.end(), [this](const auto& f) { return f.goes_with(mine_); });
  differs_ = uniform && mine_.refused == 0 ? 0 : 1;
  uint64_t balance = 0;
  for (const Fingerprint& f : table_) balance += f.balance;
  const bool among_islands = scope == Scope::kAll && islands_.size() > 1;
  if (among_islands) balance = compare_islands(balance, exchange);
  if (scope == Scope::kAll && balance != 0) differs_ = 1;
  whole_ = table_;
  if (differs_ != 0 && scope == Scope::kAll) gather_tables(exchange);
  for (size_t i = 1; i < ranks.size(); ++i) {
    exchange.send(ranks[i], kVerdict, &differs_, sizeof differs_);
    if (differs_ != 0) exchange.send(ranks[i], kWholeTable, whole_.data(), whole_.size() * sizeof(Fingerprint));
  }
  exchange.wait();
  if (differs_ != 0) throw Error(Code::kMismatch, difference(whole_));
}

// Heads tell one another what their islands call. Returns the balance of all.
uint64_t Agreement::compare_islands(uint64_t balance, Exchange& exchange) {
  summaries_.assign(islands_.size(), Summary{mine_, differs_ == 0});
  summaries_[island_].first.balance = balance;
  for (size_t i = 0; i < islands_.size(); ++i) {
    if (i == island_) continue;
    exchange.recv(islands_[i].front(), kSummaries, &summaries_[i], sizeof(Summary));
    exchange.send(islands_[i].front(), kSummaries, &summaries_[island_], sizeof(Summary));
  }
  exchange.wait();
  balance = 0;
  for (const Summary& s : summaries_) {
    differs_ |= s.uniform == 0 || !s.first.goes_with(mine_) ? 1 : 0;
    balance += s.first.balance;
  }
  return balance;
}

// Somewhere ranks differ: heads collect what every rank calls.
void Agreement::gather_tables(Exchange& exchange) {
  tables_.resize(islands_.size());
  for (size_t i = 0; i < islands_.size(); ++i) {
    if (i == island_) continue;
    tables_[i].resize(islands_[i].size());
    exchange.recv(islands_[i].front(), kTables, tables_[i].data(), tables_[i].size() * sizeof(Fingerprint));
    exchange.send(islands_[i].front(), kTables, table_.data(), table_.size() * sizeof(Fingerprint));
  }
  exchange.wait();
  tables_[island_] = table_;
  whole_.resize(members_.size());
  for (size_t i = 0; i < islands_.size(); ++i) {
    for (size_t j = 0; j < islands_[i].size(); ++j) whole_[static_cast<size_t>(islands_[i][j])] = tables_[i][j];
  }
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
  if (!text.empty()) return text;
  return "the counts of an all_to_all_v differ: some rank sends another more or less than that one is to receive. What "
         "rank "
         "a sends to rank b must be what rank b receives from rank a";
}

}  // namespace polyccl
