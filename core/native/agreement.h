// Agreement: ranks compare the fields of a call that must be equal, before any of them enters it.
//
// A tree over the link: the ranks of an island tell its head (its first rank), the heads tell one another, and each
// head tells its island the verdict. Where all agree that is one small message each way and one exchange between heads;
// where they differ, the whole table follows, so that every rank can say who differs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "executor.h"
#include "fingerprint.h"
#include "link/link.h"

namespace polyccl {

class Agreement {
 public:
  enum class Scope { kAll, kIsland };

  Agreement(LinkGroup& group, uint64_t tag_group, int rank, const std::vector<std::vector<int>>& islands,
            const std::vector<std::string>& members);

  // Throws kMismatch with who differs in what; kTimeout with who never came. Blocks; calls are numbered, one at a time.
  void agree(const Fingerprint& mine, Scope scope, Deadline deadline, const Interrupted& interrupted);

 private:
  using Table = std::vector<Fingerprint>;
  struct Summary {
    Fingerprint first;  // its balance is that of the whole island
    uint64_t uniform = 1;
  };
  struct Exchange;

  void as_member(Scope scope, Exchange& exchange);
  void as_head(Scope scope, Exchange& exchange);
  uint64_t compare_islands(uint64_t balance, Exchange& exchange);
  void gather_tables(Exchange& exchange);
  std::string difference(const Table& table) const;
  std::string ranks_text(const std::vector<int>& ranks) const;

  LinkGroup& group_;
  const uint64_t tag_group_;
  const int rank_;
  const std::vector<std::vector<int>> islands_;
  const std::vector<std::string> members_;
  size_t island_ = 0;  // this rank's
  uint64_t sequence_ = 0;
  // What messages read and write. It outlives a call that fails: until the group has failed too, the link may still use
  // it.
  Fingerprint mine_;
  uint64_t differs_ = 0;
  Table table_, whole_;
  std::vector<Summary> summaries_;
  std::vector<Table> tables_;
};

}  // namespace polyccl
