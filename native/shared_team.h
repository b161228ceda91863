// Teams by number of threads: decoders and free functions of one process share theirs, so that cores are not oversubscribed.
#pragma once

#include <memory>
#include <mutex>

#include "team.h"

namespace tenure {

struct SharedTeam {
    explicit SharedTeam(int threads) : team(threads) {}
    std::mutex turn;  // held while a caller uses the team
    Team team;
};

// threads 0 = all cores. A team lives as long as somebody holds it.
std::shared_ptr<SharedTeam> shared_team(int threads);

}  // namespace tenure
