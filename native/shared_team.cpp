#include "shared_team.h"

#include <map>

namespace tenure {

std::shared_ptr<SharedTeam> shared_team(int threads) {
    static std::mutex guard;
    static std::map<int, std::weak_ptr<SharedTeam>> teams;
    if (threads <= 0) threads = Team::cores();
    const std::lock_guard lock(guard);
    auto& known = teams[threads];
    auto team = known.lock();
    if (!team) known = team = std::make_shared<SharedTeam>(threads);
    return team;
}

}  // namespace tenure
